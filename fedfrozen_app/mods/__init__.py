"""What an existing Flower client adds: a mod, and one line in its training."""

from fedfrozen_app.models.freeze import freeze_
from fedfrozen_app.mods.active import active_entries, selection_of

__all__ = ["active_entries", "freeze_", "selection_of"]
