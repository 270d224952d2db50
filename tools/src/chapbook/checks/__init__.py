"""What a command can prove of a finished package.

Each check yields the problems it finds, as sentences that say what is wrong and what would be right. None means passed.
"""
