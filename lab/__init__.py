"""Measuring for developers: benchmarks, comparisons with other systems, random models, `moebius verify`. It
stands above `app`, and an installation that serves does without it."""
