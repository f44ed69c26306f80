"""Turns questions into recorded trajectories: protocols, tools, rewards, trees, workers, evaluation."""
