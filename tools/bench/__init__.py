"""Benchmarks of the package beside torch's own wrappers.

    python -m tools.bench NAME [--quick] [--json FILE]

Every benchmark builds all contenders in one process, times them in interleaved rounds and prints medians, quartiles
and ratios: on a shared machine a ratio means something where a time does not.  ``registry.py`` lists the benchmarks,
``contenders.py`` the wrappers; a contender that cannot be built is reported under the table and in the JSON.
"""
