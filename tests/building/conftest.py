from tests.pipeline.conftest import bert

__all__ = ["bert"]
