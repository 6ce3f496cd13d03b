"""Every route of ours, in the order in which they are asked."""

from service import comparison_routes, event_routes, export_routes, report_routes, routes, webhook_routes
from service.docs import docs
from service.home import home
from service.own_pages import assets
from service.sign_in import signing_in

API = (
    *routes.ROUTERS,
    event_routes.events,
    report_routes.reports,
    export_routes.exports,
    comparison_routes.comparing,
    webhook_routes.webhooks,
)
ALL = (*API, docs, signing_in, home, assets)
