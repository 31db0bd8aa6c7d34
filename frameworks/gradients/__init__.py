"""The gradient engine: it averages named gradients over ranks in buckets while backward computes other gradients.

The engine:
    reducer: `GradientReducer`, the class that programs use.
    settings: the arguments that must be the same on all ranks.
    first_step: the first step, in which gradients are recorded and agreed on.
    intake: copying a gradient to its slot, or complaining of it.
    steps_in_flight: starting and waiting for the reductions of steps.
    step_memory: the memory of steps and of residuals.
    agreement: agreement on gradients, and errors that all ranks raise.
    additions: gradients that are passed for the first time in a later step.
    lag: how many steps late gradients are applied.

Buckets:
    layout: where gradients lie, and how they are cut into buckets.
    bucket_comms: the communicators that carry buckets.
    compression: the forms on the wire, with error feedback.
    stages: the stages of a compressed reduction.
    blocks, top_k, power_sgd: the compressed forms.
    on_device: gradients on a GPU, which are packed, compressed, reduced and unpacked there.
    two_stage_reduction: reductions of two collectives, for compression in blocks.

Decisions of rank 0:
    replanning: when the buckets change, and how.
    bucket_sizing: the size of buckets.
    priorities: the order in which buckets are started, and `Arriving`.
    ready_order: the order in which gradients become ready.

Times:
    timeline: the times of the last steps, and the report.
    traces: files of these times.
"""
