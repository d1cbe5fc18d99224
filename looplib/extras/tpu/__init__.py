"""TPUs: connecting to one, dividing its cores, and starting again after it was lost.

Names that other rooms may use, by file:
    connection: none
"""
