"""Networks and measurements that show what stowplan does to real training steps."""
