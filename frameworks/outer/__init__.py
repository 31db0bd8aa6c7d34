"""Training that hardly communicates: ranks take inner steps alone, and an outer optimizer joins their changes.

training: `DiLoCo`, `BlockMomentum` and `LocalSGD`, the classes that programs use.
rules: what the outer optimizer does with an average change.
fragments: the parts of the parameters that are averaged one after the other, and when.
notes: the facts about an average in which all ranks must agree.
averages: the average of a fragment over the ranks of a communicator.
swarm_averages: the average of a fragment over the members of a swarm, and how newcomers begin.
swarm_sums: the sum of changes over the members of a swarm, whole or compressed.
"""
