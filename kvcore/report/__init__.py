"""What people and programs read: JSON-ready data made from plans, and text made from that data alone."""
