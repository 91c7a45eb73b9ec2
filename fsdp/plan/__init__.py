"""Choices made from the model's sizes."""
