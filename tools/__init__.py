"""Scripts of this repository; nothing here is part of the installed package."""
