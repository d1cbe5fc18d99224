"""A repository whose files are written in WORKSPACE, so that nothing is downloaded."""

def _inline_repository_impl(ctx):
    for path, content in ctx.attr.files.items():
        ctx.file(path, content, executable = False)

inline_repository = repository_rule(
    implementation = _inline_repository_impl,
    attrs = {"files": attr.string_dict()},
    local = True,
)
