"""Parts that the simulated accelerator and fakecuda share.

These are the race detector and its reports, facts about operators, the rules of captures, and holds of streams.
"""

__all__: list[str] = []
