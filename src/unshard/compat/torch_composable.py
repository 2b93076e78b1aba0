"""`torch.distributed._composable`: the legacy call, once it is there."""

__all__: list[str] = []
