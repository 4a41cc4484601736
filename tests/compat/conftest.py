"""Fixtures of the tests of DeepSpeed's swappers, which are those of swapped optimizers."""

from swap.conftest import one_thread as one_thread
from swap.conftest import store as store
