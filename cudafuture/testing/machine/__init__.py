"""Parts that the simulated accelerator and fakecuda share: the race detector, its reports, and holds of streams."""

__all__: list[str] = []
