"""What everything stands on: errors, sentences, masks of secrets, files, folders, the console, plug-ins.

Names that other rooms may use, by file:
    console: none
    diagnosis: none
    files: none
    folders: none
    messages: none
    numbers: none
    plugins: none
    progress: none
"""
