"""What a plan changes in the program of a rank once all axes have lowered it, a file for each."""
