"""What the documentation site is made of beside the pages in ``docs``: parts of other files, and tables made from the code."""
