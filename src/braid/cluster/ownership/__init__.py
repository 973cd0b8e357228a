"""The three reactors to an ownership record (model/ownership.py). All of them are pure functions.

    owner_step      the broker that a record names    broker/segments/segments.py acts
    leader_step     the cluster leader                cluster/leader.py acts
    move_request    an operator's call                broker/admin/moves.py acts

The record says whose turn it is:

    record           owner_step                       leader_step                       move_request
    none             lets the segment go              places it → ASSIGNED              try again later
    ASSIGNED         opens it → SERVING               —                                 waits if it is assigned to the
                                                                                        target; else try again later
    SERVING          serves it                        its owner drains: adds a move     adds a move
                                                      balancing (only when nothing
                                                      else is to do): adds a move
    SERVING, a move  prepares → DRAINING, or          —                                 waits for a move to the same
                     gives the move up                                                  target; refuses another
    DRAINING         seals → SEALED, or gives the     —                                 the same
                     move up → ASSIGNED, epoch + 1
    SEALED           —                                assigns it: to the target of      the same
                                                      the move if possible → ASSIGNED

    its owner is     owner_step                       leader_step                       move_request
    restarted        takes it again → ASSIGNED,       —                                 —
                     epoch + 1
    down             —                                clean: assigns it to another;     refuses, unless SEALED
                                                      lost: waits, or continues by
                                                      the topic's policy
    unable to open   says why, tries on               the same                          clean: assigns it to the target;
                                                                                        else refuses
    back, after it   opens it again                   assigns it to that owner          —
    was given up

Lost: all brokers whose disks hold what no other disk does are down or unable to open the segment (leader_step.py).

Every change of a record is a compare-and-swap, so that two reactors that act at the same time cannot both succeed.
"""
