"""Members that PyTorch's code and programs use of the state of a module that `fully_shard` was applied to.

`torch.distributed.pipelining` runs the backwards of a step with gradient synchronisation off. After the last one it
takes `fully_shard.state(stage)`, calls `post_backward()` on each parameter group of each of its states, and then
`_root_post_backward_final_callback()` (until torch 2.14). Torch 2.15 calls `finalize_backward` of the module.
"""

from __future__ import annotations

from ..engine.api import FSDPState


def _end_backward(state: FSDPState) -> None:
    """Reduce the gradients of all parameter groups and reshard."""
    if state.is_initialised:
        state.find_root(state.modules()[0]).end_backward()


def _find_root(state: FSDPState) -> None:
    state.find_root(state.modules()[0])


# Members of `FSDPState` while the drop-in is installed.
MEMBERS = {
    "_state_ctx": property(lambda state: state),
    "all_states": (),  # no parameter group needs a call of its own: the last callback reduces them all
    "_root_post_backward_final_callback": _end_backward,
    "_comm_ctx": property(lambda state: state),  # 2.15 compares those of stages, which must not share one
    "_lazy_init": _find_root,
    "_pre_forward": FSDPState.pre_forward,  # the compiler compares functions with these two
    "_post_forward": FSDPState.post_forward,
}
