"""What programs with pydantic share: a question, the form of its answer, and an answer."""

from typing import Literal

from pydantic import BaseModel, Field


class Sum(BaseModel):
    """What the answer holds."""

    apples: int = Field(ge=0, le=99)
    size: Literal["small", "large"]


QUESTION = "Tom has 3 apples and buys 4 more. How many?"
ANSWER = Sum(apples=7, size="small")
