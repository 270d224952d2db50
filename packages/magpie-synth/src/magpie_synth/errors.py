"""What can go wrong, by name."""


class MagpieError(ValueError):
    """Base of the errors of this package."""


class TemplateError(MagpieError):
    """No pre-query template can be derived from a chat template. `code` names the reason in one word."""

    def __init__(self, message: str, *, code: str) -> None:
        super().__init__(message)
        self.code = code


class SystemPromptError(TemplateError):
    """The chat template rejects or drops the system text."""


class BackendError(MagpieError):
    """The model cannot do what a stage needs, or failed at it for good. Rows that were not finished stay pending."""
