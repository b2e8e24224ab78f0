"""What lies in a checkpoint folder, read and checked."""
