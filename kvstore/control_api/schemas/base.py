"""Base classes of the JSON schemas."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, model_validator


class ResponseModel(BaseModel):
    """Base class of responses. NaN and infinity are invalid: JSON cannot represent them."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


_MOST_FIELDS = 64


class RequestModel(BaseModel):
    """Base class of request bodies. An unknown field is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _few_fields(cls, body: object) -> object:
        """Reject bodies with very many fields: pydantic reports each unknown field, which takes seconds for 300,000."""
        if isinstance(body, dict) and len(body) > _MOST_FIELDS:
            raise ValueError(f"a request body may have at most {_MOST_FIELDS} fields")
        return body
