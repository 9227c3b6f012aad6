"""Patches Triton's interpreter for the rest of this process, so that it runs many small launches quickly."""

import functools


@functools.cache
def mend() -> None:
    """Patches triton.language once for each launch. The interpreter patches it again whenever one jitted function calls
    another, which changes nothing and takes half of its time. Has no effect on a Triton that patches differently."""
    from triton.runtime import interpreter

    patch = getattr(interpreter, "_patch_lang", None)
    scope_type = getattr(interpreter, "_LangPatchScope", None)
    if patch is None or scope_type is None:
        return
    languages = (interpreter.tl, interpreter.tl.core)
    patched: set[int] = set()

    @functools.cache
    def seen_by(function):
        return {id(value) for value in function.__globals__.values() if any(value is lang for lang in languages)}

    def patch_lang(function):
        wanted = seen_by(function)
        if patched and wanted <= patched:
            return scope_type()  # it has nothing to restore
        scope = patch(function)
        if not patched:  # a launch begins here, and ends when it restores this patch
            restore = scope.restore

            def end_launch():
                patched.clear()
                restore()

            scope.restore = end_launch
        patched.update(wanted)
        return scope

    interpreter._patch_lang = patch_lang
