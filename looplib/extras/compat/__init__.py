"""What plug-ins change of Keras and TensorFlow, because there is no other way; the core's own is in `looplib/compat`.

Names that other rooms may use, by file:
    methods: none
    pipelines: none
"""
