"""Tests, in folders as the package has them. Workers import a test module by its full name: `tests.comm.test_order`."""
