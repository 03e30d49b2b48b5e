"""What people call from Python: the estimator, TopAgg, prices."""
