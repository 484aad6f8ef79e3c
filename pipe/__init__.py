"""Stages in time: schedules as values, and what runs them."""
