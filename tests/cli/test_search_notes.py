"""What `planner search` says beside the plan it found."""

SEARCH = ("--profile", "h100-sxm5-80gb", "--gpus", 2, "--global-batch", 8)


def test_a_cut_batch_is_noted_by_module(planner, write_model):
    """P33: with two devices every plan by dp or microbatches cuts the batch of a BatchNorm."""
    path = write_model()
    path.write_text(
        path.read_text().replace(
            "nn.Linear(8, 8)", "nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))"
        )
    )
    cut = planner("search", path, *SEARCH, "--dp", 2, "--microbatch-size", 2)
    assert cut.code == 0
    assert "BatchNorm layers.0.1, layers.1.1, layers.2.1 and 1 more: " in cut.stderr
    assert "8 samples into 4 parts (dp=2, num_microbatches=2)" in cut.stderr
    whole = planner("search", path, *SEARCH, "--tp", 2, "--microbatch-size", 8)
    assert whole.code == 0
    assert "BatchNorm" not in whole.stderr
