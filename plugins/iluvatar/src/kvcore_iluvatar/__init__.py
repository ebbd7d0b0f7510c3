"""kvcore platform for CoreX devices."""
