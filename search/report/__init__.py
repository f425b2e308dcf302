"""A search's answer for people: the plan, what lost to it and why, and what would make it fit."""
