"""Parts of the documentation site other than pages: includes of other files, diagrams, and tables generated from the code."""
