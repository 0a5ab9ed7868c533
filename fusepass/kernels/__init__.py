"""From a row program to code that runs: the reference, the two printers, their schedules, and the registered op."""
