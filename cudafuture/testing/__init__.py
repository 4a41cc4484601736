"""Tools for testing programs of several processes, in this project and in others.

``world``, a pytest fixture, runs a function in processes that are reused from test to test::

    @pytest.mark.world(2)
    def test_the_sum_is_the_same_everywhere(world):
        def total():
            tensor = torch.ones(1) * dist.get_rank()
            dist.all_reduce(tensor)
            return tensor.item()

        assert world.run(total) == [1.0, 1.0]

``FaultyEngine`` is an I/O engine whose disk fails. ``torchrun`` launches a script as the command does. Neither
``torchrun`` nor ``world`` uses a port that could be taken, and neither leaves a process behind. The extra ``testing``
installs the dependencies of the pytest plugin, which pytest then finds automatically.

Two simulators, ``cudafuture.testing.sim`` and ``cudafuture.testing.fakecuda``, run stream code without a GPU and report
its races.
"""

from cudafuture.testing.faulty_engine import FaultyEngine
from cudafuture.testing.launch import Finished, torchrun
from cudafuture.testing.world import World, WorldError

__all__ = ["FaultyEngine", "Finished", "World", "WorldError", "torchrun"]
