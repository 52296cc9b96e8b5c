"""Typed keys of the aiohttp application."""

from __future__ import annotations

from aiohttp import web

from weir_server.http.service import Service

SERVICE = web.AppKey("service", Service)
