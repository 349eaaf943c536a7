"""Predictions of a training's speed on more nodes than were measured."""
