"""Not rclpy: see the README beside."""


class NameValidationException(Exception):
    def __init__(self, name: str, error_msg: str, invalid_index: int) -> None:
        super().__init__(f"Invalid {name!r}: {error_msg}")


class InvalidTopicNameException(NameValidationException):
    pass
