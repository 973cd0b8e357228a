"""The three reactors to an ownership record (model/ownership.py). All of them are pure functions.

    owner_step      the broker that a record names    broker/segments/segments.py acts
    leader_step     the cluster leader                cluster/leader.py acts
    move_request    an operator's call                broker/admin/moves.py acts

`replica_sets` says which brokers are to hold copies of a segment; the leader writes it.

The record says whose turn it is:

    record           owner_step                       leader_step                       move_request
    none             lets the segment go              places it → ASSIGNED              try again later
    ASSIGNED         opens it → SERVING               —                                 waits if it is assigned to the
                                                                                        target; else try again later
    SERVING          serves it                        its owner drains: adds a move     adds a move
                                                      other replicas are wanted: adds
                                                      a change
                                                      balancing (only when nothing
                                                      else is to do): adds a move
    SERVING, a       brings the new replicas up to    it cannot be done any more:       adds a move, which takes the
    change           date, then changes the set       another change, or none           change back
    SERVING, a move  prepares → DRAINING, or          —                                 waits for a move to the same
                     gives the move up                                                  target; refuses another
    DRAINING         seals → SEALED, or gives the     —                                 the same
                     move up → ASSIGNED, epoch + 1
    SEALED           —                                assigns it: to the target of      the same
                                                      the move if possible → ASSIGNED
    RECOVERING       lets it go; as a replica, it     counts the votes → ASSIGNED in    try again later
                     promises the epoch               the same epoch

    its owner is     owner_step                       leader_step                       move_request
    restarted        takes it again → ASSIGNED,       —                                 —
                     epoch + 1
    down             —                                clean: assigns it to another;     refuses, unless SEALED
                                                      enough replicas: → RECOVERING,
                                                      epoch + 1;
                                                      lost: waits, or continues by
                                                      the topic's policy
    unable to open   says why, tries on               the same                          clean: assigns it to the target;
                                                                                        else refuses
    back, after it   opens it again; as a replica,    assigns it to that owner; of      —
    was given up     it promises the epoch            replicas: → RECOVERING

Lost: all brokers whose disks hold what no other disk does are down or unable to open the segment; of replicas, so many
that the others are too few to vote (leader_step.py).

Every change of a record is a compare-and-swap, so that two reactors that act at the same time cannot both succeed.
"""
