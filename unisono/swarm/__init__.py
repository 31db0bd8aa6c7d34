"""`Swarm`: processes that enter and leave at any time, and whose calls end with the contributions of those that stay.

swarm: `un.Swarm`, the calls, and what a program sees of the members.
settings: the arguments of a swarm, checked.
entry: the time of a process in a swarm, from its registration until it leaves.
membership: one member's part in the views: which members there are, and when they change.
answers: the answers of a member to the requests of others.
attempts: the calls of the program, made again until they have the contributions of all current members.
settling: when the members of a view measure their network.
pace: how long a program computes between two calls.
needs: the need of a change of the view, as one member sees it.
proposer: the change of a view, by the member that proposes the next one.
agreement: how members choose the next view, without I/O.
views: members and views as data.
calls: one call: its contribution, its two phases and its result.
peers: what a member knows of the others: whether they answer, and which call they are in.
links: requests and replies between processes of the job.
routes: the ways to processes, of which some cannot be dialled.
streams: connections over those that another process has dialled, and relays.
parking: the connections that processes park at others.
stream_server: the streams that reach a process, and those that it relays.
meeting_place: where processes find the members.
state: how newcomers get the state of the members, who compare it.
sharing: the call of `Swarm.state`.
trees: a state as arrays and a description.
communicators: the communicator of a view.
"""
