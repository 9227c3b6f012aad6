"""Triton's interpreter, for many small launches: half of its time went into patching triton.language anew in every call
of one jitted function by another, which changes nothing within a launch."""

import functools


@functools.cache
def patch_once_a_launch() -> None:
    """For the rest of this process. Without effect where this Triton does not patch as those that are known do."""
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
            return scope_type()  # with nothing to restore
        scope = patch(function)
        if not patched:  # a launch begins; it ends by restoring what this changed
            restore = scope.restore

            def end_launch():
                patched.clear()
                restore()

            scope.restore = end_launch
        patched.update(wanted)
        return scope

    interpreter._patch_lang = patch_lang
