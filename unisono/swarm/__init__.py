"""`Swarm`: processes that enter and leave at any time, and whose calls end with the contributions of those that stay.

swarm: `un.Swarm`, the calls, and what a program sees of the members.
membership: one member's part in the views: which members there are, and when they change.
proposer: the change of a view, by the member that proposes the next one.
agreement: how members choose the next view, without I/O.
views: members and views as data.
calls: a call that is repeated until it has the contributions of all current members.
peers: what a member knows of the others: whether they answer, and which call they are in.
links: requests and replies between processes of the job.
routes: the ways to processes, of which some cannot be dialled.
streams: connections over those that another process has dialled, and relays.
meeting_place: where processes find the members.
state: how newcomers get the state of the members, who compare it.
trees: a state as arrays and a description.
communicators: the communicator of a view.
"""
