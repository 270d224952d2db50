from draft_docs.cli import main

if __name__ == "__main__":
    main()
