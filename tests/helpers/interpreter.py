"""Mends Triton's interpreter for the rest of this process: it takes every numpy, and many small launches are quick."""

import functools


@functools.cache
def mend() -> None:
    convert_one_element()
    patch_once_a_launch()


@functools.cache
def convert_one_element() -> None:
    """Lets Triton 3.6 use a value as a number, such as a bound of ``range``, with numpy 2.4 or later: the value is an
    array of shape [1], and numpy converts only arrays without dimensions. Later Tritons remove the dimension."""
    from triton.runtime import interpreter

    patch_tensor = getattr(interpreter, "_patch_lang_tensor", None)
    if patch_tensor is None:  # not as any Triton that is known patches
        return

    def patch_lang_tensor(tensor, scope):
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_lang_tensor


@functools.cache
def patch_once_a_launch() -> None:
    """Half of the interpreter's time went into patching triton.language anew in every call of one jitted function by
    another, which changes nothing within a launch. Without effect where this Triton does not patch as those that are
    known do."""
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
