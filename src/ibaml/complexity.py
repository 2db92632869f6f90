"""``python -m ibaml.complexity``: what does a meta-gradient cost here? See `ibaml.paper`."""

if __name__ == "__main__":
    from ibaml.paper.complexity.command import main

    main()
