"""How many KV-cache blocks fit on each device."""
