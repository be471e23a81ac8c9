"""OpenAI's HTTP API for language models: conversion of its JSON to requests and from responses, and the base of
the handlers of all text APIs."""
