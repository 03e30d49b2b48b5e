"""The Python interface: the estimator, TopAgg, and prices."""
