"""What a stock kubelet does not say: the environment, whose turn it is, what ended unseen."""
