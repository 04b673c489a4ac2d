"""A job as the parameter of a flow: the form of the UI, and what the server checks before a run."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from flows.config import JobConfig
from flows.job_file import load_job_config, validate_job_config


class _Form:
    """Makes the server name the field of a job that is wrong.

    For `anyOf` alone it often says no more than that the job fits none of the choices. So the
    choices, which are what the UI offers, let every mapping and every text pass, and a mapping is
    checked beside them.
    """

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        job, path, mapping = handler(schema)["anyOf"]
        return {
            "anyOf": [job, path | {"title": "YAML file"}, mapping | {"title": "JSON"}],
            "if": {"type": "object"},
            "then": job,
        }


# A mapping that is no job stays one: `read_job` says better than pydantic what is wrong with it.
JobParameter = Annotated[
    JobConfig | str | dict[str, Any], Field(union_mode="left_to_right"), _Form()
]


def read_job(parameter: JobConfig | str | dict[str, Any]) -> JobConfig:
    """Return the job that a flow was given: as it is, as a mapping, or as the path of a file.

    Raises:
        ConfigError: no such file, or the wrong fields, each with what to write instead.
    """
    if isinstance(parameter, JobConfig):
        return parameter
    if isinstance(parameter, str):
        return load_job_config(Path(parameter))
    return validate_job_config(parameter, origin="config")
