"""What runs on the meta device must show of the real one, or be refused.

`rehearsal` runs the model before its export, `any_size` and `meta_results` hold what it made to
other sizes and to real tensors, `outside_modes` steps out of the modes that watch.
"""
