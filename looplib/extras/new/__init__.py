"""`python -m looplib new DIR`: a small project that trains and passes its tests as it is.

The files of a project are in `templates/`, where the package is called `my_project`. The three starts differ in
`trainers/` only.

Names that other rooms may use, by file:
    command: add
    project: none
"""
