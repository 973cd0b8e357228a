"""Copies of a segment's log on several brokers (docs/decisions/0044-replicas.md).

    copies.py        what a follower does: it keeps copies, and answers owners and the leader
    stream.py        what an owner does for one follower: it finds the common prefix, and sends what is missing
    replication.py   what an owner does for a segment: it counts what its followers hold, and changes their set
    elections.py     what the cluster leader does when an owner is gone: it asks the copies, and assigns the segment

A follower answers only for its own disk. An owner counts an answer only in the session and in the epoch in which it was
given. Both rules together keep the promise that a confirmed record is on enough disks (I2).
"""
